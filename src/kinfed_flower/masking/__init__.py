"""Masked sums: sites upload numbers of which the server can open the sum alone (Bonawitz et al., 2017)."""
