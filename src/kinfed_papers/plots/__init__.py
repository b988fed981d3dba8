"""Pictures that only analyses of papers draw, in the style of kinfed's own."""
