"""Cases of what the host does: imports, and the calls around a stubbed driver; no arithmetic."""
