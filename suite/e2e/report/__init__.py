"""Results for people: tables, progress, the demo's verdict. Reads only the database."""
