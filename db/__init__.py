"""The results database: SQLAlchemy models, Alembic migrations, one writer, read queries. Never imports torch."""

from db import decision_models as decision_models  # whoever reads any table knows them all
