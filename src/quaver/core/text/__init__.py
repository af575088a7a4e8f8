"""What words, tables and errors look like to a reader; nothing that knows a number or a layer."""
