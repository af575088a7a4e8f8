"""Stages of torch's pipelines, and the backwards of their layers in two parts; no schedule of our own."""
