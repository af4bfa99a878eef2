// Package jobs is what the program does: one file a consumer or a cron, with
// its args, its worker and its declaration together.
package jobs

import (
	"github.com/jackc/pgx/v5/pgxpool"

	"afluente/eventlog"
	"afluente/jobs/archive"
	"afluente/jobs/waha"
)

// Deps is what the jobs work with. All fields are required.
type Deps struct {
	Archive  *archive.Archive
	Pool     *pgxpool.Pool
	Events   *eventlog.Events
	WAHA     *waha.Client
	Webhooks *Webhooks
}

// All returns every job of the program. What is not here does not run.
func All(d Deps) []eventlog.Declaration {
	return []eventlog.Declaration{
		auditArchive(d),
		dailyBudgetReset(d),
		partitionMaintenance(d),
		processPendingWebhooks(d),
		reconcileEvents(d),
		recoverStuckMessages(d),
		webhookDelivery(d),
		webhookDispatch(d),
		whatsAppSend(d),
	}
}
