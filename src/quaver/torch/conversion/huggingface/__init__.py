"""Conversion of transformers' decoder and encoder layers and Mamba-2 mixers to Quaver's own layers."""
