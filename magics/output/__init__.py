"""Output of cells: parsing, removal of duplicates and display."""
