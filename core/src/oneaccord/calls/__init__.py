"""One way for every call: arguments, request, plan, run."""
