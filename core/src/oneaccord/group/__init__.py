"""The interface for users: groups, meshes, and the way in which ranks come together."""
