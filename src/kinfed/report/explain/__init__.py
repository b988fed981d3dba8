"""Why a client learns from another."""
