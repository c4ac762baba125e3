"""The command lines of the magics: commands, options and values."""
