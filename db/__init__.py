"""The results database: SQLAlchemy models, Alembic migrations, one writer, read queries. Never imports torch."""
