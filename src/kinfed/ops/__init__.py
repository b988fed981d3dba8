"""Arithmetic on tables of models, [N, d], and on relations, [N, N]."""
