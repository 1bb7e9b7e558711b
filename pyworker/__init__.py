"""What runs under PostgreSQL: supervisors (inside the server, standard library only), child mains, the wire."""
