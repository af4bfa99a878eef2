package jobs

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"afluente/db"
	"afluente/eventlog"
	"afluente/eventlog/event"
	"afluente/jobs/waha"
)

// WhatsAppSendArgs asks for one message to be sent over WhatsApp.
type WhatsAppSendArgs struct {
	OrganizationID uuid.UUID `json:"organization_id"`
	MessageID      string    `json:"message_id"`
}

func (WhatsAppSendArgs) Kind() string { return "whatsapp-send-worker" }

func (WhatsAppSendArgs) InsertOpts() river.InsertOpts { return river.InsertOpts{Queue: "whatsapp"} }

func whatsAppSend(d Deps) eventlog.Declaration {
	return eventlog.On(func(e eventlog.Event[event.MessageQueued]) WhatsAppSendArgs {
		return WhatsAppSendArgs{OrganizationID: e.OrganizationID, MessageID: e.Payload.MessageID}
	}, &whatsAppSendWorker{pool: d.Pool, waha: d.WAHA}).Ordered("conversation_id", eventlog.Skips)
}

// whatsAppSendWorker hands a message to WAHA. The message's status, the event
// that tells of it and the job's completion are one transaction. When that is
// lost after WAHA took the message, the next attempt sends again under the
// same idempotency key.
type whatsAppSendWorker struct {
	river.WorkerDefaults[WhatsAppSendArgs]

	pool *pgxpool.Pool
	waha *waha.Client
}

func (w *whatsAppSendWorker) Timeout(*river.Job[WhatsAppSendArgs]) time.Duration {
	return 20 * time.Second
}

func (w *whatsAppSendWorker) Work(ctx context.Context, job *river.Job[WhatsAppSendArgs]) error {
	messageID, err := uuid.Parse(job.Args.MessageID)
	if err != nil {
		return river.JobCancel(errors.New("the event's message_id is not a UUID"))
	}
	queries := db.New(w.pool)
	message, err := queries.GetOutgoingMessage(ctx, messageID, job.Args.OrganizationID)
	if errors.Is(err, pgx.ErrNoRows) {
		return river.JobCancel(fmt.Errorf("message %s: not in organization %s", messageID, job.Args.OrganizationID))
	} else if err != nil {
		return fmt.Errorf("read message %s: %w", messageID, err)
	}

	// An earlier attempt may have come this far.
	if message.WahaMessageID != nil {
		return w.complete(ctx, job, message, *message.WahaMessageID)
	}
	if message.Phone == nil || !strings.ContainsAny(*message.Phone, "0123456789") {
		return w.fail(ctx, job, message, sendFailure{
			code: "invalid", permanent: true, err: errors.New("the contact has no phone number"),
		})
	}
	if err := queries.MarkMessageSending(ctx, message.ID, message.OrganizationID); err != nil {
		return fmt.Errorf("mark message %s as sending: %w", message.ID, err)
	}
	wahaID, err := w.waha.SendText(ctx, waha.Text{
		Session:        message.Session,
		ChatID:         chatID(*message.Phone),
		Body:           message.Body,
		IdempotencyKey: message.ID.String(),
	})
	if err != nil {
		failure := sendFailure{code: "unreachable", err: err}
		if statusErr, ok := errors.AsType[*waha.StatusError](err); ok {
			failure.code = strconv.Itoa(statusErr.Code)
			failure.permanent = statusErr.Permanent()
		}
		return w.fail(ctx, job, message, failure)
	}
	return w.complete(ctx, job, message, wahaID)
}

// complete marks the message as sent, tells of it and completes the job.
func (w *whatsAppSendWorker) complete(
	ctx context.Context, job *river.Job[WhatsAppSendArgs], message db.GetOutgoingMessageRow, wahaID string,
) error {
	return pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		if err := db.New(tx).MarkMessageSent(ctx, &wahaID, message.ID, message.OrganizationID); err != nil {
			return fmt.Errorf("mark message %s as sent: %w", message.ID, err)
		}
		_, err := eventlog.Emit(ctx, tx, eventlog.Event[event.MessageSent]{
			OrganizationID: message.OrganizationID,
			EntityID:       message.ID,
			Payload: event.MessageSent{
				Direction:      "out",
				ConversationID: message.ConversationID.String(),
				ContactID:      message.ContactID.String(),
				Channel:        "whatsapp",
				Body:           message.Body,
				MessageID:      message.ID.String(),
			},
			Metadata: eventlog.Metadata{
				Source:         job.Kind,
				IdempotencyKey: "message.sent:" + message.ID.String(),
			},
		})
		if err != nil {
			return err
		}
		completed, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
		if err != nil {
			return fmt.Errorf("complete job %d: %w", job.ID, err)
		}
		// River says nil for a job that was rescued or cancelled meanwhile.
		if completed.State != rivertype.JobStateCompleted {
			return fmt.Errorf("complete job %d: it is %s by now", job.ID, completed.State)
		}
		return nil
	})
}

type sendFailure struct {
	code      string // see event.MessageFailed
	permanent bool
	err       error
}

// fail returns the error that River is to record. Where it is the job's last
// word, the message is given up first and an event tells of it.
func (w *whatsAppSendWorker) fail(
	ctx context.Context, job *river.Job[WhatsAppSendArgs], message db.GetOutgoingMessageRow, failure sendFailure,
) error {
	err := fmt.Errorf("send message %s: %w", message.ID, failure.err)
	// A process that stops gives the attempt back; that is no last word.
	stopped := errors.Is(ctx.Err(), context.Canceled)
	if !failure.permanent && (stopped || job.Attempt < job.MaxAttempts) {
		return err
	}
	// The work may have failed because its time was up.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	txErr := pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		if err := db.New(tx).MarkMessageFailed(ctx, message.ID, message.OrganizationID); err != nil {
			return fmt.Errorf("mark message %s as failed: %w", message.ID, err)
		}
		_, err := eventlog.Emit(ctx, tx, eventlog.Event[event.MessageFailed]{
			OrganizationID: message.OrganizationID,
			EntityID:       message.ID,
			Payload: event.MessageFailed{
				MessageID:    message.ID.String(),
				ErrorCode:    failure.code,
				ErrorMessage: failure.err.Error(),
				Retryable:    !failure.permanent,
			},
			Metadata: eventlog.Metadata{
				Source: job.Kind,
				// A retry of a dead job counts its attempts anew, its errors not.
				IdempotencyKey: fmt.Sprintf("message.failed:%s:%d:%d", message.ID, job.ID, len(job.Errors)),
			},
		})
		return err
	})
	if txErr != nil {
		return errors.Join(err, txErr)
	}
	if failure.permanent {
		return river.JobCancel(err)
	}
	return err
}

// chatID is WAHA's name of a person: the digits of the number with a suffix.
func chatID(phone string) string {
	digits := strings.Map(func(r rune) rune {
		if r < '0' || r > '9' {
			return -1
		}
		return r
	}, phone)
	return digits + "@c.us"
}
