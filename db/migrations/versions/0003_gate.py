"""The gate's tables: policies, decisions and their evidence, noise, pinned releases and change points."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "gate_policy",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gate_policy")),
    )
    op.create_table(
        "baseline",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("cell_id", sa.String(), nullable=False),
        sa.Column("arm_id", sa.String(), nullable=False),
        sa.Column("metric", sa.String(), nullable=False),
        sa.Column("comparable_hash", sa.String(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("pinned_at", sa.String(length=32), nullable=False),
        sa.Column("approver", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.CheckConstraint(
            "value BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308", name=op.f("ck_baseline_value_finite")
        ),
        sa.ForeignKeyConstraint(["arm_id"], ["arm.id"], name=op.f("fk_baseline_arm_id")),
        sa.ForeignKeyConstraint(["cell_id"], ["cell.id"], name=op.f("fk_baseline_cell_id")),
        sa.ForeignKeyConstraint(["metric"], ["metric.name"], name=op.f("fk_baseline_metric")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_baseline_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_baseline")),
        sa.UniqueConstraint(
            "cell_id",
            "arm_id",
            "metric",
            "comparable_hash",
            "pinned_at",
            name=op.f("uq_baseline_cell_id_arm_id_metric_comparable_hash_pinned_at"),
        ),
    )
    op.create_table(
        "gate_decision",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("policy_id", sa.String(), nullable=False),
        sa.Column("verdict", sa.String(), nullable=False),
        sa.Column("exit_code", sa.Integer(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("inputs_sha", sa.String(), nullable=False),
        sa.Column("inputs", sa.LargeBinary(), nullable=False),
        sa.Column("engine_sha", sa.String(), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.String(length=32), nullable=False),
        sa.Column("supersedes", sa.String(), nullable=True),
        sa.Column("override_by", sa.String(), nullable=True),
        sa.Column("override_reason", sa.String(), nullable=True),
        sa.CheckConstraint("(verdict = 'PASS') = (exit_code = 0)", name=op.f("ck_gate_decision_pass_is_zero")),
        sa.CheckConstraint("verdict IN ('PASS', 'FAIL', 'INCONCLUSIVE')", name=op.f("ck_gate_decision_verdict")),
        sa.CheckConstraint(
            "(supersedes IS NULL) = (override_by IS NULL) AND (supersedes IS NULL) = (override_reason IS NULL)",
            name=op.f("ck_gate_decision_override"),
        ),
        sa.CheckConstraint("exit_code BETWEEN 0 AND 4", name=op.f("ck_gate_decision_exit_code")),
        sa.ForeignKeyConstraint(["policy_id"], ["gate_policy.id"], name=op.f("fk_gate_decision_policy_id")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_gate_decision_run_id")),
        sa.ForeignKeyConstraint(["supersedes"], ["gate_decision.id"], name=op.f("fk_gate_decision_supersedes")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gate_decision")),
        sa.UniqueConstraint("supersedes", name=op.f("uq_gate_decision_supersedes")),
    )
    with op.batch_alter_table("gate_decision", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_gate_decision_run_id"), ["run_id"], unique=False)

    op.create_table(
        "change_point",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("decision_id", sa.String(), nullable=False),
        sa.Column("cell_id", sa.String(), nullable=False),
        sa.Column("arm_id", sa.String(), nullable=False),
        sa.Column("metric", sa.String(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("p", sa.Double(), nullable=False),
        sa.Column("rise", sa.Double(), nullable=False),
        sa.CheckConstraint(
            "p BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308", name=op.f("ck_change_point_p_finite")
        ),
        sa.CheckConstraint(
            "rise BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308", name=op.f("ck_change_point_rise_finite")
        ),
        sa.ForeignKeyConstraint(["arm_id"], ["arm.id"], name=op.f("fk_change_point_arm_id")),
        sa.ForeignKeyConstraint(["cell_id"], ["cell.id"], name=op.f("fk_change_point_cell_id")),
        sa.ForeignKeyConstraint(["decision_id"], ["gate_decision.id"], name=op.f("fk_change_point_decision_id")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_change_point_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_change_point")),
        sa.UniqueConstraint(
            "decision_id",
            "cell_id",
            "arm_id",
            "metric",
            "run_id",
            name=op.f("uq_change_point_decision_id_cell_id_arm_id_metric_run_id"),
        ),
    )
    with op.batch_alter_table("change_point", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_change_point_cell_id_metric"), ["cell_id", "metric"], unique=False)

    op.create_table(
        "gate_evidence",
        sa.Column("decision_id", sa.String(), nullable=False),
        sa.Column("cell_id", sa.String(), nullable=False),
        sa.Column("arm_id", sa.String(), nullable=False),
        sa.Column("endpoint", sa.String(), nullable=False),
        sa.Column("effect", sa.Double(), nullable=True),
        sa.Column("lo", sa.Double(), nullable=True),
        sa.Column("hi", sa.Double(), nullable=True),
        sa.Column("p_within", sa.Double(), nullable=True),
        sa.Column("p_beyond", sa.Double(), nullable=True),
        sa.Column("margin", sa.Double(), nullable=True),
        sa.Column("power", sa.Double(), nullable=True),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("needed", sa.Integer(), nullable=True),
        sa.Column("verdict", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.CheckConstraint(
            "verdict IN ('PASS', 'FAIL', 'INCONCLUSIVE', 'QUIET')", name=op.f("ck_gate_evidence_verdict")
        ),
        sa.CheckConstraint(
            "effect BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308",
            name=op.f("ck_gate_evidence_effect_finite"),
        ),
        sa.CheckConstraint(
            "hi BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308", name=op.f("ck_gate_evidence_hi_finite")
        ),
        sa.CheckConstraint(
            "lo BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308", name=op.f("ck_gate_evidence_lo_finite")
        ),
        sa.CheckConstraint(
            "margin BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308",
            name=op.f("ck_gate_evidence_margin_finite"),
        ),
        sa.CheckConstraint(
            "p_beyond BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308",
            name=op.f("ck_gate_evidence_p_beyond_finite"),
        ),
        sa.CheckConstraint(
            "p_within BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308",
            name=op.f("ck_gate_evidence_p_within_finite"),
        ),
        sa.CheckConstraint(
            "power BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308",
            name=op.f("ck_gate_evidence_power_finite"),
        ),
        sa.ForeignKeyConstraint(["arm_id"], ["arm.id"], name=op.f("fk_gate_evidence_arm_id")),
        sa.ForeignKeyConstraint(["cell_id"], ["cell.id"], name=op.f("fk_gate_evidence_cell_id")),
        sa.ForeignKeyConstraint(["decision_id"], ["gate_decision.id"], name=op.f("fk_gate_evidence_decision_id")),
        sa.PrimaryKeyConstraint("decision_id", "cell_id", "arm_id", "endpoint", name=op.f("pk_gate_evidence")),
    )
    op.create_table(
        "noise_model",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("decision_id", sa.String(), nullable=False),
        sa.Column("family", sa.String(), nullable=False),
        sa.Column("comparable_hash", sa.String(), nullable=False),
        sa.Column("metric", sa.String(), nullable=False),
        sa.Column("spread", sa.Double(), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.CheckConstraint(
            "spread BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308",
            name=op.f("ck_noise_model_spread_finite"),
        ),
        sa.ForeignKeyConstraint(["decision_id"], ["gate_decision.id"], name=op.f("fk_noise_model_decision_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_noise_model")),
        sa.UniqueConstraint(
            "decision_id",
            "family",
            "comparable_hash",
            "metric",
            name=op.f("uq_noise_model_decision_id_family_comparable_hash_metric"),
        ),
    )


def downgrade() -> None:
    op.drop_table("noise_model")
    op.drop_table("gate_evidence")
    with op.batch_alter_table("change_point", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_change_point_cell_id_metric"))

    op.drop_table("change_point")
    with op.batch_alter_table("gate_decision", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_gate_decision_run_id"))

    op.drop_table("gate_decision")
    op.drop_table("baseline")
    op.drop_table("gate_policy")
