"""One GEMM an expert over rows that lie group by group: operands, products, gradients; nothing routes a token here."""
