"""Who learns from whom, in three parts: what is compared, how weights follow, and among whom."""
