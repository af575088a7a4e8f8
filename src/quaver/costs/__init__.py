"""What a layer costs before it has run: bytes, FLOPs, time, what backward keeps; nothing is measured here."""
