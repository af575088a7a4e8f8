"""Names of other libraries that users type already, each a thin layer over ours; no number and no tensor class."""
