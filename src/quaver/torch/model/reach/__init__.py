"""Which modules of any model multiply by a weight, and what each becomes once converted; no rule and no report."""
