"""What an optimizer's kernel does to its states: codes, scales and noise as functions; no update, nothing launched."""
