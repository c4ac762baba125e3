"""``rankscope top``: the board, live, in a terminal; with Textual."""
