"""Starting the ranks of a job as processes of this host, and ending all of them when one fails."""
