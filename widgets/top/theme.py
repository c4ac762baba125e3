"""The colours of the board in a terminal."""

from dataclasses import replace

from textual.theme import BUILTIN_THEMES

__all__ = ["THEME"]

#: The colours of the terminal itself, so that it is legible on any background.
THEME = replace(
    BUILTIN_THEMES["ansi-dark"],
    name="rankscope",
    accent="ansi_cyan",
    variables={
        "ansi-background": "ansi_default",
        "ansi-foreground": "ansi_default",
        "border": "ansi_blue",
        "border-blurred": "ansi_default",
        # Not reverse, which Textual takes out of a text on one background.
        "block-cursor-foreground": "ansi_bright_white",
        "block-cursor-background": "ansi_blue",
        "block-cursor-text-style": "bold",
        "block-hover-background": "ansi_default",
        "footer-key-foreground": "ansi_default",
        "input-cursor-background": "ansi_default",
        "input-cursor-foreground": "ansi_default",
        "input-cursor-text-style": "reverse",
        "input-selection-background": "ansi_blue",
        "input-selection-foreground": "ansi_default",
        "scrollbar": "ansi_blue",
        "scrollbar-hover": "ansi_blue",
        "scrollbar-active": "ansi_blue",
        "scrollbar-background": "ansi_default",
        "scrollbar-background-hover": "ansi_default",
        "scrollbar-background-active": "ansi_default",
        "scrollbar-corner-color": "ansi_default",
        "screen-selection-background": "ansi_blue",
        "screen-selection-foreground": "ansi_default",
    },
)
