"""The launcher `ray`: ranks are actors in a placement group."""
