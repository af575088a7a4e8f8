"""What other libraries ask of a model, each in a room that imports its library; nothing else imports these rooms."""
