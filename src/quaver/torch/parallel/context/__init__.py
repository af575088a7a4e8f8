"""Context parallelism: order of sequence chunks, attention across ranks, and its application to a model."""
