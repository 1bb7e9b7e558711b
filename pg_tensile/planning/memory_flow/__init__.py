"""Memory that flows between jobs that train at once (Waterwave)."""
