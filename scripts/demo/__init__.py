"""The demo: a PostgreSQL of its own learns the prices of diamonds, then trains two models at once in little memory."""
