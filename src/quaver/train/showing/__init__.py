"""What results look like: pictures, tables, lines of progress; no figure is computed here."""
