"""Integrations with transformers, accelerate, Lightning, PEFT and torchtitan; each module imports its own library."""
