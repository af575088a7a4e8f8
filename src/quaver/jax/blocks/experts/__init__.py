"""Experts as functions of arrays: who goes where, rows laid out by expert, their sums; no GEMM and no module."""
