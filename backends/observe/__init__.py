"""Diagnosis of hangs and the export of Flight Recorder data."""
