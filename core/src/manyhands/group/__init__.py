"""What users hold: groups, meshes, and how ranks come together."""
