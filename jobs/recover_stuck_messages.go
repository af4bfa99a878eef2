package jobs

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"afluente/db"
	"afluente/eventlog"
	"afluente/eventlog/event"
)

const (
	// sendingFor is how long a message may be on its way out before somebody
	// looks whether a job still goes on with it.
	sendingFor = 2 * time.Minute

	// maxRecovered bounds one transaction.
	maxRecovered = 200
)

// RecoverStuckMessagesArgs asks for the messages that are on their way out and
// that nobody sends.
type RecoverStuckMessagesArgs struct{}

func (RecoverStuckMessagesArgs) Kind() string { return "recover-stuck-messages" }

func (RecoverStuckMessagesArgs) InsertOpts() river.InsertOpts {
	return river.InsertOpts{Queue: "maintenance"}
}

func recoverStuckMessages(d Deps) eventlog.Declaration {
	return eventlog.Cron("* * * * *", RecoverStuckMessagesArgs{}, &recoverStuckMessagesWorker{pool: d.Pool}, eventlog.Policy{})
}

type recoverStuckMessagesWorker struct {
	river.WorkerDefaults[RecoverStuckMessagesArgs]

	pool *pgxpool.Pool
}

func (w *recoverStuckMessagesWorker) Timeout(*river.Job[RecoverStuckMessagesArgs]) time.Duration {
	return time.Minute
}

// recovered tells what a run did.
type recovered struct {
	Requeued int `json:"requeued"`
	Failed   int `json:"failed"`
}

// Work leaves a message alone while a job of whatsapp-send-worker still lives for
// it: River retries and rescues that. One whose job was given up is failed, and
// one without a job is queued again.
func (w *recoverStuckMessagesWorker) Work(ctx context.Context, job *river.Job[RecoverStuckMessagesArgs]) error {
	var done recovered
	before := time.Now().Add(-sendingFor)
	for {
		found, err := w.recover(ctx, job.Kind, before, &done)
		if err != nil {
			return fmt.Errorf("recover messages: %w", err)
		}
		if found < maxRecovered {
			return river.RecordOutput(ctx, done)
		}
	}
}

func (w *recoverStuckMessagesWorker) recover(ctx context.Context, source string, before time.Time, done *recovered) (found int, err error) {
	var batch recovered
	err = pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		queries := db.New(tx)
		if err := queries.UseJobIndexes(ctx); err != nil {
			return err
		}
		messages, err := queries.TakeStuckMessages(ctx, WhatsAppSendArgs{}.Kind(), before, maxRecovered)
		if err != nil {
			return fmt.Errorf("take: %w", err)
		}
		found = len(messages)
		for _, message := range messages {
			key := fmt.Sprintf("message.recovered:%s:%d", message.ID, message.UpdatedAt.UnixMicro())
			metadata := eventlog.Metadata{Source: source, IdempotencyKey: key}
			if message.GaveUp {
				batch.Failed++
				err = failMessage(ctx, tx, message, metadata)
			} else {
				batch.Requeued++
				_, err = eventlog.Emit(ctx, tx, eventlog.Event[event.MessageQueued]{
					OrganizationID: message.OrganizationID,
					EntityID:       message.ID,
					Payload: event.MessageQueued{
						MessageID: message.ID.String(), ConversationID: message.ConversationID.String(),
					},
					Metadata: metadata,
				})
			}
			if err != nil {
				return fmt.Errorf("message %s: %w", message.ID, err)
			}
		}
		return nil
	})
	if err == nil {
		done.Requeued += batch.Requeued
		done.Failed += batch.Failed
	}
	return found, err
}

func failMessage(ctx context.Context, tx pgx.Tx, message db.TakeStuckMessagesRow, metadata eventlog.Metadata) error {
	if err := db.New(tx).MarkMessageFailed(ctx, message.ID, message.OrganizationID); err != nil {
		return fmt.Errorf("mark as failed: %w", err)
	}
	_, err := eventlog.Emit(ctx, tx, eventlog.Event[event.MessageFailed]{
		OrganizationID: message.OrganizationID,
		EntityID:       message.ID,
		Payload: event.MessageFailed{
			MessageID:    message.ID.String(),
			ErrorCode:    "abandoned",
			ErrorMessage: "its job was given up while the message was on its way",
			Retryable:    true,
		},
		Metadata: metadata,
	})
	return err
}
