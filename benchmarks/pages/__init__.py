"""What docs/performance.md predicts, and what others published; nothing is measured here."""
