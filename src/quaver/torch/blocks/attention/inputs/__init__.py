"""What attention is asked, checked and in one form: layouts, masks, the call; nothing is computed here."""
