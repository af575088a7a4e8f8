"""What a number in few bits is: formats, rounding, scales, noise, rotation, in numpy; no operand and no layer."""
