"""How ranks of one job reach each other: connections that both ends have proved, and the loop that reads them."""
