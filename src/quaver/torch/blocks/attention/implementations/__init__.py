"""What may answer a call of attention: packages, torch's own, eight bits, the plain formula; none chooses itself."""
