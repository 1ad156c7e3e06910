"""What ``manyhands bench`` measures: backends side by side, in the same processes, with every result checked."""
