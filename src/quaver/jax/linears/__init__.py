"""The three GEMMs of a linear layer, their derivative, and the functions built on them: linear, dot_general,
grouped_dot.
"""
