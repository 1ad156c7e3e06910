"""What tests share: worlds of ranks, stand-ins, and ways to wait."""
