"""Messages with tags: matched on arrival, and moved by whichever thread waits."""
