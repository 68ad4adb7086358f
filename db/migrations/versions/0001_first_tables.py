"""First tables: runs, their cells, arms and blocks, one row per outcome, and what hangs on it."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "arm",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("pool", sa.String(), nullable=False),
        sa.Column("plants", sa.JSON(), nullable=False),
        sa.CheckConstraint("pool IN ('static', 'unified', 'unified_token_major')", name=op.f("ck_arm_pool")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_arm")),
    )
    op.create_table(
        "cell",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("family", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("backend", sa.String(), nullable=False),
        sa.Column("launcher", sa.String(), nullable=False),
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("dtype", sa.String(), nullable=False),
        sa.Column("page_size", sa.Integer(), nullable=False),
        sa.Column("graph", sa.Boolean(), nullable=False),
        sa.Column("workload", sa.String(), nullable=False),
        sa.Column("params", sa.JSON(), nullable=False),
        sa.CheckConstraint("launcher IN ('native', 'interpreter', 'reference')", name=op.f("ck_cell_launcher")),
        sa.CheckConstraint("page_size > 0", name=op.f("ck_cell_page_size")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cell")),
    )
    op.create_table(
        "code_rev",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("repo", sa.String(), nullable=False),
        sa.Column("sha", sa.String(), nullable=False),
        sa.Column("patch_sha", sa.String(), nullable=False),
        sa.Column("branch", sa.String(), nullable=True),
        sa.Column("dirty", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_code_rev")),
        sa.UniqueConstraint("repo", "sha", "patch_sha", name=op.f("uq_code_rev_repo_sha_patch_sha")),
    )
    op.create_table(
        "environment",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("comparable_hash", sa.String(), nullable=False),
        sa.Column("device_name", sa.String(), nullable=False),
        sa.Column("driver", sa.String(), nullable=True),
        sa.Column("cuda", sa.String(), nullable=True),
        sa.Column("torch", sa.String(), nullable=False),
        sa.Column("triton", sa.String(), nullable=False),
        sa.Column("kernel_library", sa.String(), nullable=True),
        sa.Column("kernel_version", sa.String(), nullable=True),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_environment")),
    )
    with op.batch_alter_table("environment", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_environment_comparable_hash"), ["comparable_hash"], unique=False)

    op.create_table(
        "item",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("task", sa.String(), nullable=False),
        sa.Column("doc_hash", sa.String(), nullable=False),
        sa.Column("prompt_hash", sa.String(), nullable=False),
        sa.Column("target_hash", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_item")),
    )
    with op.batch_alter_table("item", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_item_task"), ["task"], unique=False)

    op.create_table(
        "metric",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("unit", sa.String(), nullable=False),
        sa.Column("better", sa.String(), nullable=False),
        sa.Column("timing", sa.Boolean(), nullable=False),
        sa.CheckConstraint("better IN ('higher', 'lower', 'zero', 'neither')", name=op.f("ck_metric_better")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_metric")),
    )
    op.create_table(
        "run",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("suite", sa.String(), nullable=False),
        sa.Column("code_rev_id", sa.String(), nullable=False),
        sa.Column("plan_sha", sa.String(), nullable=False),
        sa.Column("plan", sa.JSON(), nullable=False),
        sa.Column("planned", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("started_at", sa.String(length=32), nullable=False),
        sa.Column("finished_at", sa.String(length=32), nullable=True),
        sa.CheckConstraint("state IN ('running', 'finished', 'interrupted', 'failed')", name=op.f("ck_run_state")),
        sa.ForeignKeyConstraint(["code_rev_id"], ["code_rev.id"], name=op.f("fk_run_code_rev_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_run")),
    )
    with op.batch_alter_table("run", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_run_started_at"), ["started_at"], unique=False)

    op.create_table(
        "block",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("cell_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("arm_order", sa.JSON(), nullable=False),
        sa.Column("seed", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["cell_id"], ["cell.id"], name=op.f("fk_block_cell_id")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_block_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_block")),
        sa.UniqueConstraint("run_id", "cell_id", "number", name=op.f("uq_block_run_id_cell_id_number")),
    )
    op.create_table(
        "cell_run",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("cell_id", sa.String(), nullable=False),
        sa.Column("arm_id", sa.String(), nullable=False),
        sa.Column("block_id", sa.String(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("reason_code", sa.String(), nullable=True),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("launcher", sa.String(), nullable=True),
        sa.Column("environment_id", sa.String(), nullable=True),
        sa.Column("revision", sa.String(), nullable=True),
        sa.Column("dirty", sa.Boolean(), nullable=True),
        sa.Column("effective", sa.JSON(), nullable=False),
        sa.Column("prompt_hash", sa.String(), nullable=True),
        sa.Column("started_at", sa.String(length=32), nullable=False),
        sa.Column("duration_s", sa.Double(), nullable=False),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("signal", sa.Integer(), nullable=True),
        sa.Column("stderr_tail", sa.String(), nullable=True),
        sa.CheckConstraint(
            "status <> 'passed' OR environment_id IS NOT NULL", name=op.f("ck_cell_run_passed_environment")
        ),
        sa.CheckConstraint("status <> 'passed' OR launcher IS NOT NULL", name=op.f("ck_cell_run_passed_launcher")),
        sa.CheckConstraint("status = 'passed' OR reason IS NOT NULL", name=op.f("ck_cell_run_reason")),
        sa.CheckConstraint(
            "status IN ('passed', 'wrong', 'refused', 'crashed', 'timed_out', 'skipped')",
            name=op.f("ck_cell_run_status"),
        ),
        sa.CheckConstraint("attempt > 0", name=op.f("ck_cell_run_attempt")),
        sa.CheckConstraint("duration_s >= 0", name=op.f("ck_cell_run_duration_s")),
        sa.ForeignKeyConstraint(["arm_id"], ["arm.id"], name=op.f("fk_cell_run_arm_id")),
        sa.ForeignKeyConstraint(["block_id"], ["block.id"], name=op.f("fk_cell_run_block_id")),
        sa.ForeignKeyConstraint(["cell_id"], ["cell.id"], name=op.f("fk_cell_run_cell_id")),
        sa.ForeignKeyConstraint(["environment_id"], ["environment.id"], name=op.f("fk_cell_run_environment_id")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_cell_run_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cell_run")),
        sa.UniqueConstraint(
            "run_id",
            "cell_id",
            "arm_id",
            "block_id",
            "attempt",
            name=op.f("uq_cell_run_run_id_cell_id_arm_id_block_id_attempt"),
        ),
    )
    with op.batch_alter_table("cell_run", schema=None) as batch_op:
        batch_op.create_index(
            batch_op.f("ix_cell_run_cell_id_arm_id_started_at"), ["cell_id", "arm_id", "started_at"], unique=False
        )

    op.create_table(
        "comparison",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("static_id", sa.String(), nullable=False),
        sa.Column("candidate_id", sa.String(), nullable=False),
        sa.Column("metric", sa.String(), nullable=False),
        sa.Column("method", sa.String(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("effect", sa.Double(), nullable=True),
        sa.Column("verdict", sa.String(), nullable=False),
        sa.Column("inputs_sha", sa.String(), nullable=False),
        sa.Column("created_at", sa.String(length=32), nullable=False),
        sa.CheckConstraint("verdict IN ('equal', 'differs', 'not_comparable')", name=op.f("ck_comparison_verdict")),
        sa.CheckConstraint(
            "effect BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308",
            name=op.f("ck_comparison_effect_finite"),
        ),
        sa.ForeignKeyConstraint(["candidate_id"], ["cell_run.id"], name=op.f("fk_comparison_candidate_id")),
        sa.ForeignKeyConstraint(["metric"], ["metric.name"], name=op.f("fk_comparison_metric")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_comparison_run_id")),
        sa.ForeignKeyConstraint(["static_id"], ["cell_run.id"], name=op.f("fk_comparison_static_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_comparison")),
        sa.UniqueConstraint(
            "static_id",
            "candidate_id",
            "metric",
            "method",
            name=op.f("uq_comparison_static_id_candidate_id_metric_method"),
        ),
    )
    with op.batch_alter_table("comparison", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_comparison_run_id"), ["run_id"], unique=False)

    op.create_table(
        "ingest_log",
        sa.Column("source_sha", sa.String(), nullable=False),
        sa.Column("cell_run_id", sa.String(), nullable=False),
        sa.Column("ingested_at", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["cell_run_id"], ["cell_run.id"], name=op.f("fk_ingest_log_cell_run_id")),
        sa.PrimaryKeyConstraint("source_sha", name=op.f("pk_ingest_log")),
        sa.UniqueConstraint("cell_run_id", name=op.f("uq_ingest_log_cell_run_id")),
    )
    op.create_table(
        "item_result",
        sa.Column("cell_run_id", sa.String(), nullable=False),
        sa.Column("item_id", sa.String(), nullable=False),
        sa.Column("repeat", sa.Integer(), nullable=False),
        sa.Column("correct", sa.Boolean(), nullable=False),
        sa.Column("answer", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["cell_run_id"], ["cell_run.id"], name=op.f("fk_item_result_cell_run_id")),
        sa.ForeignKeyConstraint(["item_id"], ["item.id"], name=op.f("fk_item_result_item_id")),
        sa.PrimaryKeyConstraint("cell_run_id", "item_id", "repeat", name=op.f("pk_item_result")),
    )
    op.create_table(
        "measurement",
        sa.Column("cell_run_id", sa.String(), nullable=False),
        sa.Column("metric", sa.String(), nullable=False),
        sa.Column("stat", sa.String(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("lo", sa.Double(), nullable=True),
        sa.Column("hi", sa.Double(), nullable=True),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.CheckConstraint(
            "hi BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308", name=op.f("ck_measurement_hi_finite")
        ),
        sa.CheckConstraint(
            "lo BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308", name=op.f("ck_measurement_lo_finite")
        ),
        sa.CheckConstraint("n >= 0", name=op.f("ck_measurement_n")),
        sa.CheckConstraint(
            "value BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308", name=op.f("ck_measurement_value_finite")
        ),
        sa.ForeignKeyConstraint(["cell_run_id"], ["cell_run.id"], name=op.f("fk_measurement_cell_run_id")),
        sa.ForeignKeyConstraint(["metric"], ["metric.name"], name=op.f("fk_measurement_metric")),
        sa.PrimaryKeyConstraint("cell_run_id", "metric", "stat", name=op.f("pk_measurement")),
    )
    op.create_table(
        "sample_block",
        sa.Column("cell_run_id", sa.String(), nullable=False),
        sa.Column("metric", sa.String(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("shape", sa.JSON(), nullable=False),
        sa.Column("codec", sa.String(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["cell_run_id"], ["cell_run.id"], name=op.f("fk_sample_block_cell_run_id")),
        sa.PrimaryKeyConstraint("cell_run_id", "metric", "seq", name=op.f("pk_sample_block")),
    )


def downgrade() -> None:
    op.drop_table("sample_block")
    op.drop_table("measurement")
    op.drop_table("item_result")
    op.drop_table("ingest_log")
    with op.batch_alter_table("comparison", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_comparison_run_id"))

    op.drop_table("comparison")
    with op.batch_alter_table("cell_run", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_cell_run_cell_id_arm_id_started_at"))

    op.drop_table("cell_run")
    op.drop_table("block")
    with op.batch_alter_table("run", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_run_started_at"))

    op.drop_table("run")
    op.drop_table("metric")
    with op.batch_alter_table("item", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_item_task"))

    op.drop_table("item")
    with op.batch_alter_table("environment", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_environment_comparable_hash"))

    op.drop_table("environment")
    op.drop_table("code_rev")
    op.drop_table("cell")
    op.drop_table("arm")
