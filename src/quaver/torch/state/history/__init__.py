"""Delayed scaling's window of amaxes: recorded, and rolled when a step ends; no other recipe's state."""
