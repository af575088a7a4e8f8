"""Linear layers of linen, NNX and Equinox models under recipes: `convert`, and the rules that select them."""
