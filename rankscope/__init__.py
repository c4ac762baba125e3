"""Rankscope."""
