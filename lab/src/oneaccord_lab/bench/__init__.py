"""The measurements of ``oneaccord bench``: backends side by side, in the same processes, with every result checked."""
