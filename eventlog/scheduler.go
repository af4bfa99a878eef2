package eventlog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"go.uber.org/zap"

	"afluente/db"
)

const (
	// tickInterval is how often a scheduler looks for ticks, and so how much later
	// than its tick a job is at most.
	tickInterval = time.Second

	// tickTimeout bounds the decision about one cron, so that one that hangs costs
	// the others no more than that.
	tickTimeout = 10 * time.Second
)

// Errors of [Scheduler.RunNow] and its siblings.
var (
	ErrNoCron          = errors.New("there is no such cron")
	ErrCronWaits       = errors.New("a job of the cron waits already")
	ErrCronSwitchedOff = errors.New("the cron is switched off by the file of overrides")
)

// SchedulerConfig is what a [Scheduler] is made of.
type SchedulerConfig struct {
	Pool *pgxpool.Pool
	Plan *Plan
	Log  *zap.Logger
	// Now says what time it is; nil asks the database, whose clock is the same for
	// every process. It may jump: what was decided stays so.
	Now func(context.Context) (time.Time, error)
}

// Scheduler makes the ticks of a plan's crons into jobs. Any number of them may
// run in any number of processes.
type Scheduler struct {
	pool  *pgxpool.Pool
	log   *zap.Logger
	now   func(context.Context) (time.Time, error)
	crons map[string]Declaration
	names []string // sorted
	jobs  *river.Client[pgx.Tx]
}

// NewScheduler returns a scheduler, not running.
func NewScheduler(config SchedulerConfig) (*Scheduler, error) {
	s := &Scheduler{
		pool: config.Pool, log: config.Log.Named("crons"), now: config.Now, crons: make(map[string]Declaration), names: []string{},
	}
	if s.now == nil {
		s.now = func(ctx context.Context) (time.Time, error) { return db.New(config.Pool).GetClock(ctx) }
	}
	for _, d := range config.Plan.declarations {
		if d.cron != nil {
			s.crons[d.kind] = d
			s.names = append(s.names, d.kind)
		}
	}
	var err error
	if s.jobs, err = NewInserter(config.Pool, config.Log); err != nil {
		return nil, fmt.Errorf("make scheduler: %w", err)
	}
	return s, nil
}

// Register makes the plan's crons known, in one transaction. One that is known
// goes on where it was; a new one, or one with another spec or zone, fires next at
// its next time.
func (s *Scheduler) Register(ctx context.Context) error {
	now, err := s.now(ctx)
	if err != nil {
		return fmt.Errorf("register crons: read clock: %w", err)
	}
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		for _, name := range s.names { // in one order, so that two processes cannot deadlock
			trigger := s.crons[name].cron
			err := db.New(tx).PutCron(ctx, db.PutCronParams{
				Name:      name,
				Spec:      trigger.spec,
				Zone:      trigger.policy.Zone,
				Missed:    string(trigger.policy.Missed),
				MaxMissed: int32(trigger.policy.MaxMissed),
				Jitter:    trigger.policy.Jitter,
				Disabled:  trigger.disabled,
				NextTick:  nextTick(trigger.schedule, now),
			})
			if err != nil {
				return fmt.Errorf("put cron %s: %w", name, err)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("register crons: %w", err)
	}
	return nil
}

// never is the next tick of a cron that has none left.
func never() time.Time { return time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC) }

func nextTick(s schedule, after time.Time) time.Time {
	if next := s.next(after); !next.IsZero() {
		return next
	}
	return never()
}

// Run looks for ticks until ctx ends, then returns nil. It outlives every error.
func (s *Scheduler) Run(ctx context.Context) error {
	errs := retryDelay{}
	for ctx.Err() == nil {
		wait := tickInterval
		if err := s.Step(ctx); err != nil && ctx.Err() == nil {
			wait = max(wait, errs.next())
			s.log.Error("ticks not decided, will be retried", zap.Error(err), zap.Duration("delay", wait))
		} else {
			errs = retryDelay{}
		}
		sleep(ctx, wait, nil)
	}
	return nil
}

// Step decides every tick that is due: each cron in a transaction of its own, so
// that one that fails holds up no other. It returns all errors.
func (s *Scheduler) Step(ctx context.Context) error {
	now, err := s.now(ctx)
	if err != nil {
		return fmt.Errorf("read clock: %w", err)
	}
	due, err := db.New(s.pool).ListDueCrons(ctx, s.names, now)
	if err != nil {
		return fmt.Errorf("list due crons: %w", err)
	}
	var all []error
	for _, name := range due {
		if err := s.decide(ctx, name, now); err != nil {
			all = append(all, fmt.Errorf("decide ticks of %s: %w", name, err))
		}
	}
	return errors.Join(all...)
}

// decide decides the ticks of one cron up to now.
func (s *Scheduler) decide(ctx context.Context, name string, now time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, tickTimeout)
	defer cancel()
	return pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		queries := db.New(tx)
		// A process that freezes here would hold the cron back for as long.
		if err := queries.SetIdleTimeout(ctx, tickTimeout.String()); err != nil {
			return err
		}
		cron, err := queries.LockDueCron(ctx, name, now)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil // another process is at it, or was
		} else if err != nil {
			return fmt.Errorf("lock: %w", err)
		}
		// What is in the table is what the newest process declared.
		schedule, err := parseSchedule(cron.Spec, cron.Zone)
		if err != nil {
			return err
		}
		run, skipped := choose(schedule, cron, now)
		for _, tick := range run {
			fired, err := s.fire(ctx, tx, cron, tick)
			if err != nil {
				return fmt.Errorf("fire: %w", err)
			}
			if !fired {
				skipped++
			}
		}
		return queries.AdvanceCron(ctx, nextTick(schedule, now), int64(skipped), name)
	})
}

// choose returns the ticks up to now that are to be run, oldest first, and how
// many are left out.
func choose(schedule schedule, cron db.Cron, now time.Time) (run []Tick, skipped int) {
	var late []Tick
	most := int(cron.MaxMissed)
	for at := cron.NextTick.UTC(); !at.After(now); at = nextTick(schedule, at) {
		if now.Sub(at) < lateAfter {
			run = append(run, Tick{At: at})
			continue
		}
		late = append(late, Tick{At: at, Late: true})
		if len(late) > most {
			late = late[1:]
			skipped++
		}
	}
	keep := 0
	switch {
	case Missed(cron.Missed) == MissedAll:
		keep = len(late)
	case Missed(cron.Missed) == MissedOnce && len(run) == 0:
		keep = min(1, len(late))
	}
	skipped += len(late) - keep
	return append(slices.Clone(late[len(late)-keep:]), run...), skipped
}

// fire makes a tick into a job, and returns false where it may not be one: there
// is one already, or one that waits.
func (s *Scheduler) fire(ctx context.Context, tx pgx.Tx, cron db.Cron, tick Tick) (fired bool, err error) {
	queries := db.New(tx)
	if Missed(cron.Missed) != MissedAll {
		waits, err := queries.CronWaits(ctx, cron.Name)
		if err != nil || waits {
			return false, err
		}
	}
	_, err = s.insert(ctx, tx, cron, tick)
	if errors.Is(err, errTickFired) {
		return false, nil
	}
	return err == nil, err
}

// errTickFired is returned by insert for a tick that became a job before.
var errTickFired = errors.New("the tick became a job before")

// insert inserts the job of a tick and says so in cron_ticks.
func (s *Scheduler) insert(ctx context.Context, tx pgx.Tx, cron db.Cron, tick Tick) (jobID int64, err error) {
	d := s.crons[cron.Name]
	metadata, err := json.Marshal(cronMetadata{Cron: cron.Name, Tick: tick.At, Late: tick.Late, ByHand: tick.ByHand})
	if err != nil {
		return 0, fmt.Errorf("encode metadata: %w", err)
	}
	opts := &river.InsertOpts{
		MaxAttempts: d.opts.MaxAttempts, Metadata: metadata, Priority: d.opts.Priority, Queue: d.opts.Queue, Tags: []string{"cron"},
	}
	if cron.Jitter > 0 && !tick.ByHand {
		opts.ScheduledAt = tick.At.Add(rand.N(cron.Jitter))
	}
	err = pgx.BeginFunc(ctx, tx, func(savepoint pgx.Tx) error {
		inserted, err := s.jobs.InsertTx(ctx, savepoint, encodedArgs{kind: cron.Name, args: d.cron.encoded}, opts)
		if err != nil {
			return fmt.Errorf("insert job: %w", err)
		}
		jobID = inserted.Job.ID
		put, err := db.New(savepoint).PutCronTick(ctx, db.PutCronTickParams{
			Cron: cron.Name, Tick: tick.At, JobID: jobID, Late: tick.Late, ByHand: tick.ByHand,
		})
		if err == nil && put == 0 {
			return errTickFired // takes the job back
		}
		return err
	})
	return jobID, err
}

// RunNow fires a cron now, also one that is paused or switched off, and returns
// the job. A job that waits already gives [ErrCronWaits]; a cron that is not of
// the plan or not registered gives [ErrNoCron].
func (s *Scheduler) RunNow(ctx context.Context, name string) (jobID int64, err error) {
	if _, ok := s.crons[name]; !ok {
		return 0, ErrNoCron
	}
	now, err := s.now(ctx)
	if err != nil {
		return 0, fmt.Errorf("read clock: %w", err)
	}
	err = pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		cron, err := lockCron(ctx, tx, name)
		if err != nil {
			return err
		}
		waits, err := db.New(tx).CronWaits(ctx, name)
		if err != nil {
			return err
		} else if waits {
			return ErrCronWaits
		}
		jobID, err = s.insert(ctx, tx, cron, Tick{At: now.UTC(), ByHand: true})
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("run cron %s: %w", name, err)
	}
	return jobID, nil
}

func lockCron(ctx context.Context, tx pgx.Tx, name string) (db.Cron, error) {
	cron, err := db.New(tx).LockCron(ctx, name)
	if errors.Is(err, pgx.ErrNoRows) || isInvalidText(err) {
		return db.Cron{}, ErrNoCron
	}
	return cron, err
}

// isInvalidText tells whether the database could not even read a text.
func isInvalidText(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == pgerrcode.CharacterNotInRepertoire
}

// Pause stops a cron, in every process and across restarts, until it is resumed.
// Jobs that are there already still run. Pausing twice keeps the first.
func (s *Scheduler) Pause(ctx context.Context, name, actor string) error {
	paused, err := db.New(s.pool).PauseCron(ctx, &actor, name)
	if err == nil && paused == 0 || isInvalidText(err) {
		return ErrNoCron
	} else if err != nil {
		return fmt.Errorf("pause cron %s: %w", name, err)
	}
	return nil
}

// Resume lets a paused cron go on with its next tick. Those it was paused for
// are not made up for. One that is switched off by an override gives
// [ErrCronSwitchedOff].
func (s *Scheduler) Resume(ctx context.Context, name string) error {
	now, err := s.now(ctx)
	if err != nil {
		return fmt.Errorf("read clock: %w", err)
	}
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		cron, err := lockCron(ctx, tx, name)
		switch {
		case err != nil:
			return err
		case cron.Disabled:
			return ErrCronSwitchedOff
		case cron.PausedAt == nil:
			return nil
		}
		schedule, err := parseSchedule(cron.Spec, cron.Zone)
		if err != nil {
			return err
		}
		return db.New(tx).ResumeCron(ctx, nextTick(schedule, now), name)
	})
	if err != nil {
		return fmt.Errorf("resume cron %s: %w", name, err)
	}
	return nil
}

// CronState is how a cron is.
type CronState struct {
	Name      string        `json:"name"`
	Spec      string        `json:"spec"`
	Zone      string        `json:"zone"`
	Missed    Missed        `json:"missed"`
	MaxMissed int           `json:"max_missed"`
	Jitter    time.Duration `json:"jitter_ns"`
	// State is on, paused, off by the file of overrides, or retired: not of the
	// scheduler's plan.
	State    string `json:"state"`
	PausedBy string `json:"paused_by,omitempty"`
	// LastTick is the last one that became a job; nil for none in 30 days.
	LastTick *time.Time `json:"last_tick"`
	LastLate bool       `json:"last_late,omitempty"`
	// LastState is the state of that job, empty where it is gone.
	LastState string `json:"last_state,omitempty"`
	// NextTicks are the coming ones of a cron that is on.
	NextTicks []time.Time `json:"next_ticks"`
	// Skipped is how many ticks ever became no job.
	Skipped int64 `json:"skipped"`
}

// List returns every registered cron by name, with its next n ticks.
func (s *Scheduler) List(ctx context.Context, n int) ([]CronState, error) {
	rows, err := db.New(s.pool).ListCrons(ctx)
	if err != nil {
		return nil, fmt.Errorf("list crons: %w", err)
	}
	states := make([]CronState, len(rows))
	for i, row := range rows {
		states[i] = CronState{
			Name: row.Name, Spec: row.Spec, Zone: row.Zone, Missed: Missed(row.Missed), MaxMissed: int(row.MaxMissed), Jitter: row.Jitter,
			State: "on", LastLate: row.LastLate, LastState: row.LastState, NextTicks: []time.Time{}, Skipped: row.Skipped,
		}
		if row.LastTick.Unix() != 0 {
			states[i].LastTick = new(row.LastTick.UTC())
		}
		_, declared := s.crons[row.Name]
		switch {
		case !declared:
			states[i].State = "retired"
		case row.Disabled:
			states[i].State = "off"
		case row.PausedAt != nil:
			states[i].State = "paused"
			if row.PausedBy != nil {
				states[i].PausedBy = *row.PausedBy
			}
		default:
			schedule, err := parseSchedule(row.Spec, row.Zone)
			if err != nil {
				return nil, fmt.Errorf("list crons: %w", err)
			}
			for at := row.NextTick.UTC(); len(states[i].NextTicks) < n && at.Before(never()); at = nextTick(schedule, at) {
				states[i].NextTicks = append(states[i].NextTicks, at)
			}
		}
	}
	return states, nil
}
