"""The results database: SQLAlchemy models, Alembic migrations, one writer, read queries. Never imports torch."""

from db import decision_models as decision_models  # whoever reads any table knows them all
from db import fault_models as fault_models
from db import models as models
