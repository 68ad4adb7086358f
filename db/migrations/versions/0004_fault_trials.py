"""Detection runs of planted faults."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "fault_trial",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("detection_id", sa.String(), nullable=False),
        sa.Column("code_rev_id", sa.String(), nullable=False),
        sa.Column("started_at", sa.String(length=32), nullable=False),
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("seed", sa.Integer(), nullable=False),
        sa.Column("fresh", sa.Boolean(), nullable=False),
        sa.Column("fault", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("seam", sa.String(), nullable=False),
        sa.Column("size", sa.Double(), nullable=True),
        sa.Column("expected", sa.JSON(), nullable=False),
        sa.Column("signals", sa.JSON(), nullable=False),
        sa.Column("first_signal", sa.String(), nullable=True),
        sa.Column("caught", sa.Boolean(), nullable=False),
        sa.Column("clean_twin_passed", sa.Boolean(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("gpu_seconds", sa.Double(), nullable=False),
        sa.CheckConstraint("caught = (first_signal IS NOT NULL)", name=op.f("ck_fault_trial_caught")),
        sa.CheckConstraint(
            "gpu_seconds BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308",
            name=op.f("ck_fault_trial_gpu_seconds_finite"),
        ),
        sa.CheckConstraint("seconds >= 0 AND gpu_seconds >= 0", name=op.f("ck_fault_trial_times")),
        sa.CheckConstraint(
            "seconds BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308",
            name=op.f("ck_fault_trial_seconds_finite"),
        ),
        sa.CheckConstraint(
            "size BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308", name=op.f("ck_fault_trial_size_finite")
        ),
        sa.ForeignKeyConstraint(["code_rev_id"], ["code_rev.id"], name=op.f("fk_fault_trial_code_rev_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_fault_trial")),
        sa.UniqueConstraint("detection_id", "fault", name=op.f("uq_fault_trial_detection_id_fault")),
    )
    with op.batch_alter_table("fault_trial", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_fault_trial_fault_started_at"), ["fault", "started_at"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("fault_trial", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_fault_trial_fault_started_at"))

    op.drop_table("fault_trial")
